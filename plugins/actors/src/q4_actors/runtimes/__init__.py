"""Actors on threads, processes and Ray, and the weights that they share."""
