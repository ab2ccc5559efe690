"""accelerate's YAML, linted as DeepSpeed's JSON is: keys that it rejects or ignores, and settings that contradict."""
