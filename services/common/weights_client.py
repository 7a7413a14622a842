"""The weight plane as other roles see it: publish, subscribe, fetch once. No torch."""

from services.common.client_fetch import fetch_once
from services.common.client_publish import WeightPublisher
from services.common.client_subscribe import SubscriberStatus, WeightSubscriber

__all__ = ["SubscriberStatus", "WeightPublisher", "WeightSubscriber", "fetch_once"]
