"""Job scripts for a site's scheduler, made from the site's profile and the options of `muster job`."""
