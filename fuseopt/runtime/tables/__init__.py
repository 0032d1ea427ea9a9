"""Common parts of both targets' tables: uploads, numbers, geometry."""
