"""Family of prompt sources. A member has `__len__` and `__getitem__`, which returns a `ProblemRow`."""

from llamarl.data.sources._base import ProblemRow, ProblemSource, row_name

__all__ = ["ProblemRow", "ProblemSource", "row_name"]
