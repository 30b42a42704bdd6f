"""Every experiment on one finished model, and one page that says whether early exit is worth it there."""
