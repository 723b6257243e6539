"""One program per system, run by that system's own Python; peers' environments hold none of our packages."""
