"""Servers for trained models."""
