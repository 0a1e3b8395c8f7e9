"""The nodes that hold copies for one another: membership, placement, locations, and their interface."""
