"""Parts of the documentation's site that are made from data, and checks of it: extensions of Sphinx and commands."""
