"""`muster report`: what runs left, for people, without torch.

runs reads their files, scaling compares them over numbers of ranks, tables writes facts as text and prints them, charts
draws by matplotlib, and the command puts all of it into one HTML file.
"""
