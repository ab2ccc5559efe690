"""Runs on several hosts over ssh, through DeepSpeed's launcher and pdsh."""
