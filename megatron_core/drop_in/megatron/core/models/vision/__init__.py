"""Models of images, which are not supported."""
