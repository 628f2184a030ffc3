"""The rendezvous of the ranks: address, port, id and interface; found by files where nothing lists the hosts."""
