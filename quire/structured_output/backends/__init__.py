"""Grammar libraries behind one interface, and the choice among them."""
