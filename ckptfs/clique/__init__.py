"""The nodes that hold copies for one another: who they are, who holds what, and what one may ask of another."""
