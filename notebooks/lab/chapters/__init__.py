"""One module per chapter or subject; none of them knows another."""
