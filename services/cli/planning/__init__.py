"""`dvla plan`: from what was measured and what there is to how many of what, and where. Pure Python, no processes."""
