"""Small tools that know nothing of learning: tables of named parts, files, ranges, processes that end with their parent."""
