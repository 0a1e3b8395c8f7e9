"""The control sockets: queries for anyone, admin calls for the owner."""
