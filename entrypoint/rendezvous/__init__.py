"""Where the ranks meet: address, port, id and interface; and how they find it out where nothing lists the hosts."""
