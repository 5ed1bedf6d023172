"""Functions of arrays that every other room shares: masked means, segments, trees, random draws, one step of descent."""
