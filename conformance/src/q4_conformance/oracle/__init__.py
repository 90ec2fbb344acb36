"""The oracle: weights and their exact values, draws on a grid, and the comparison by derived bounds."""
