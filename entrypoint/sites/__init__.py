"""The profiles of sites (jobs/sites) and of fabrics (jobs/fabrics), and the recognition of the current site."""
