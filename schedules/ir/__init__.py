"""Instructions and programs: the intermediate representation that every pass reads and writes."""
