"""Sampling of images and volumes, and its gradients."""
