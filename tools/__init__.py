"""Commands for people who work on this repository; ``noxfile.py`` calls them."""
