"""A family with two members, as the package has for losses and rewards."""
