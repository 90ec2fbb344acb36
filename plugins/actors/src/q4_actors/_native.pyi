from q4_actors.native import Cells as Core

__all__ = ["Core"]
