"""Family of prompt sources: where problems come from. A member has `__len__` and `__getitem__` -> `ProblemRow`."""

from llamarl.data.sources._base import ProblemRow, ProblemSource, row_name

__all__ = ["ProblemRow", "ProblemSource", "row_name"]
