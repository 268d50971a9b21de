"""The experts of a mixture: routing, sorting, and products with the weights of the chosen experts."""
