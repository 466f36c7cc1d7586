"""What does a larger global batch, a shorter message or a rarer one cost in accuracy, on real data?"""
