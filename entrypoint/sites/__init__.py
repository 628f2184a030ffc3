"""What is known of a site: its profile in jobs/sites, the fabric's in jobs/fabrics, and which of them is this one."""
