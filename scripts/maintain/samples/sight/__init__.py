"""The vision-language sample: small drawn images, questions about them, and the base model."""
