-- A small shop: a table of orders, and two functions that place and pay for an order. Each function writes its event in
-- the same transaction as its change to the order.
SET client_min_messages = warning;

CREATE TABLE IF NOT EXISTS orders (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    item     text NOT NULL,
    paid     boolean NOT NULL DEFAULT false
);

CREATE OR REPLACE FUNCTION place_order(customer text, item text) RETURNS bigint LANGUAGE sql AS $$
    WITH placed AS (
        INSERT INTO orders (customer, item) VALUES (place_order.customer, place_order.item) RETURNING id
    ), event AS (
        INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
        SELECT 'order', place_order.customer, 'OrderPlaced',
            jsonb_build_object('event', 'placed', 'order', id, 'item', place_order.item)
        FROM placed
    )
    SELECT id FROM placed
$$;

CREATE OR REPLACE FUNCTION pay_order(order_id bigint) RETURNS bigint LANGUAGE sql AS $$
    WITH settled AS (
        UPDATE orders SET paid = true WHERE id = order_id RETURNING id, customer
    ), event AS (
        INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
        SELECT 'order', customer, 'OrderPaid', jsonb_build_object('event', 'paid', 'order', id)
        FROM settled
    )
    SELECT id FROM settled
$$;

-- The slot from which the report reads the committed events. It uses a different output plugin than Walpost's slot, so
-- that the report depends on neither the slot nor the code that it checks.
SELECT pg_create_logical_replication_slot('demo_witness', 'test_decoding')
WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = 'demo_witness');
