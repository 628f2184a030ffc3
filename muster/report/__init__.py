"""`muster report`: the results of runs as tables and charts, without torch.

runs reads their files, scaling compares them over numbers of ranks, tables formats and prints their values, charts
draws with matplotlib, and __main__, the command, puts all of it into one HTML file.
"""
