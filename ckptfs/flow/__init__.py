"""The path of a file, one module per step.

The modules never import each other; they meet in the catalog.
"""
