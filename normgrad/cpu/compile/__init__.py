"""From a kernel's source to callable native code, by way of a cache on disk."""
