"""Members of the family of data sources that ask the Hub."""
