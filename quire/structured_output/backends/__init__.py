"""The grammar libraries that can serve, each behind one interface, and the choice among them."""
