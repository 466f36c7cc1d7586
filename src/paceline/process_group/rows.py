"""What a collective sends to or gets from each rank, as c10d passes it: one large tensor, or a list with a row a rank.

A large tensor is cut into rows that alias it. What does not fit the number of ranks is refused before anything is
launched: on a rank that waits for the others it would look like a rank that hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.errors import ConfigurationError


class Rows:
    """Cuts and checks the tensors of one rank's collectives.

    Every method raises ConfigurationError for tensors that do not fit. Local.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks

    def cut(self, kind: str, tensor: Tensor, num_elements: int) -> list[Tensor]:
        """Return a row of `num_elements` for each rank: 1-D views of `tensor`, which has to be contiguous."""
        if tensor.numel() != num_elements * self._num_ranks:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor has {tensor.numel()} elements, which is not "
                f"{self._num_ranks} (ranks) times {num_elements}."
            )
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor must be contiguous. Pass a copy."
            )
        flat = tensor.detach().view(-1)
        return list(flat.chunk(self._num_ranks)) if num_elements else [flat] * self._num_ranks

    def split(self, kind: str, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Cut along the first dimension: into rows of these sizes, or into equal ones if there are none."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        size, num_ranks = tensor.shape[0], self._num_ranks
        fits = len(sizes) == num_ranks and sum(sizes) == size if sizes else size % num_ranks == 0
        if not fits:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: a tensor with {size} rows cannot be split into "
                f"{sizes or 'equal parts'} for {num_ranks} ranks."
            )
        if not sizes and size:
            return list(tensor.chunk(num_ranks))  # in a third of the time of `split`
        return list(tensor.split(sizes or [0] * num_ranks))

    def check(self, kind: str, rows: Sequence[Tensor], num_elements: int) -> None:
        """Make sure that there is a row of `num_elements` for each rank."""
        if len(rows) != self._num_ranks or any(row.numel() != num_elements for row in rows):
            raise ConfigurationError(
                f"{kind} on rank {self._rank} needs {self._num_ranks} tensors of {num_elements} elements; it got "
                f"{[row.numel() for row in rows]}."
            )

    def check_exchange(self, kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Make sure that there is a row for each rank, and one from each, all of one dtype; lengths may differ."""
        dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
        if len(outputs) != self._num_ranks or len(inputs) != self._num_ranks or len(dtypes) > 1:
            raise ConfigurationError(
                f"{kind} on rank {self._rank} needs {self._num_ranks} inputs and outputs of one dtype; it got "
                f"{len(inputs)} and {len(outputs)} of {', '.join(sorted(map(str, dtypes)))}."
            )


def only(tensors: list[Tensor]) -> Tensor:
    """The tensor of a collective that takes one a rank, passed as lists. ConfigurationError if it has not one."""
    if len(tensors) != 1:
        raise ConfigurationError(f"this collective takes one tensor a rank, not {len(tensors)}.")
    return tensors[0]
