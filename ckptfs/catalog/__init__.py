"""Which files exist, and where their copies are. The only package that speaks SQL."""
