"""What a user calls: checks, plans and operators on paged attention."""
