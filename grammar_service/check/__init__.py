"""`grammar-service check`: which texts does the service's grammar admit, case by case.

    supervisor ──case by case──> worker: server + client, many texts a step
        ^                           │
        └──────── result lines ─────┘

The worker hosts a real service and drives it like an engine. Native code may crash or hang there,
so it is a process of its own: the supervisor kills and replaces it, and finds the guilty case.
"""
