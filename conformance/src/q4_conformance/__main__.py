"""``python -m q4_conformance NAME``: ``q4 conform NAME`` without loading a plugin into this process.

``q4`` loads every plugin to learn its commands; one that crashes there takes ``q4`` along. Here it can't.
"""

from __future__ import annotations

import sys

from q4core import Q4Error


def main() -> int:
    """Run the command and return its exit status."""
    import typer  # noqa: PLC0415  # an extra

    from q4_conformance.command.conform import add_conform  # noqa: PLC0415  # needs typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    add_conform(app)
    try:
        status = typer.main.get_command(app).main(prog_name="python -m q4_conformance", standalone_mode=False)
    except Q4Error as error:
        sys.stderr.write(f"error [{error.code}] {error}\n")
        return 2
    except Exception as error:
        told = getattr(error, "format_message", None)
        if not callable(told):
            raise
        sys.stderr.write(f"error {told()}\n")
        return 2
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
