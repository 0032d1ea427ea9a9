"""What the tables of both targets have in common: uploads, numbers, geometry."""
