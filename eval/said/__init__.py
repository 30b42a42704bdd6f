"""What each experiment found, in words made from its numbers by rule."""
