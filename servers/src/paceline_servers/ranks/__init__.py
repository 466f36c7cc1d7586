"""A rank's part: gradients pushed to parameter servers, sums or stepped parameters pulled from them."""
