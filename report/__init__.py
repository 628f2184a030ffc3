"""Reports of runs, for people: tables, plots, one page. Reads the files that runs leave; without torch."""
