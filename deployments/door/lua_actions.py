"""Actions of HAProxy's rules that its language has no words for, in Lua (HAProxy's Lua API, version 2.8)."""

from __future__ import annotations

from deployments.names import LIVE

HALF_CLOSE_MS = 10
"""Time after a connection's first request in which its client may close its side and still be answered."""
HALF_CLOSE = """\
core.register_action("await_half_close", {"http-req"}, function(txn)
  for _ = 1, %d do
    if not txn.req:may_recv() then return end
    core.msleep(1)
  end
end)
core.register_action("note_half_close", {"http-req"}, function(txn)
  if not txn.req:may_recv() then txn:set_var("txn.half_closed", true) end
end)
"""
"""Two actions, since HAProxy ends one that waits when the client closes its side."""
ASK_S, ASK_EVERY_S = 2, 1
"""Timeout and interval of the wait's own requests for ``LIVE``; each of HAProxy's threads sends some."""
AWAIT = """\
local asked_s, back_s = -10, -10
local function is_live(server)
  local socket = core.tcp()
  socket:settimeout(%(ask_s)d)
  local is_sent = socket:connect(server:get_addr()) and socket:send("GET %(live)s HTTP/1.0\\r\\n\\r\\n")
  local status = is_sent and socket:receive("*l")
  socket:close()
  return status and status:find("^HTTP/1%%.%%d 200")
end
local function is_back(server)
  local now_s = core.now().sec
  if now_s - asked_s >= %(every_s)d then
    asked_s = now_s
    if is_live(server) then back_s = core.now().sec end
  end
  return core.now().sec - back_s <= %(every_s)d
end
core.register_action("await_application", {"http-req"}, function(txn)
  local end_s = core.now().sec + %(wait_s)d
  repeat
    local server = core.backends.application.servers.proxy
    local status = server:get_stats().status
    if not status:find("^DOWN") or not txn:get_var("proc.was_there") then return end
    if is_back(server) then
      txn:set_var("txn.is_back", true)
      return
    end
    core.msleep(100)
  until core.now().sec > end_s
end)
"""
"""The wait asks the application itself too. A health check without an answer ends only after its timeout."""


def lua_actions(wait_s: int) -> str:
    """Return the script. Requests wait at most ``wait_s`` for the application."""
    return HALF_CLOSE % HALF_CLOSE_MS + AWAIT % {"live": LIVE, "every_s": ASK_EVERY_S, "ask_s": ASK_S, "wait_s": wait_s}
