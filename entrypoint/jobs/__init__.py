"""Job scripts: a site's profile and what the user asked for, as a script for the site's scheduler."""
