"""Delivery of the outbox's messages to receivers: an MQTT broker, a web address."""
