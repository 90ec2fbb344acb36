"""The ``q4`` command, on q4core's public names; plugins add commands of their own."""
