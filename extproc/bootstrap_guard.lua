-- What the service has seen carries a destination. All else is let through because the service is down: nobody
-- has taken a client's KV transfer parameters out of it, and some of them kill a vLLM engine.
local OPAQUE = {"^audio/", "^image/", "^video/", "^application/octet%-stream%s*$", "^application/octet%-stream%s*;"}

local function opaque(content_type)
  for _, pattern in ipairs(OPAQUE) do
    if content_type:find(pattern) and not content_type:find(",") then return true end
  end
  return false
end

local function oddly_encoded(content_type)
  return (content_type .. ";"):gsub('charset="?utf%-8"?%s*;', ""):find("charset") ~= nil
end

local function to_character(hex) return string.char(tonumber(hex, 16)) end

-- UTF-16 and UTF-32 are ASCII and zeros; JSON and forms may write any character as an escape.
local function names_connector_params(text, content_type)
  if text:find("%z") then text = text:gsub("%z", "") end
  if content_type:find("urlencoded") then text = text:gsub("%%(%x%x)", to_character) end
  if text:find("\\u00", 1, true) then text = text:gsub("\\u00(%x%x)", to_character) end
  return text:find("_transfer_params", 1, true) ~= nil
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("x-gateway-destination-endpoint") or headers:get("upgrade") then return end
  local content_type = (headers:get("content-type") or ""):lower()
  if opaque(content_type) then return end
  local body = handle:body()
  if not body then return end
  if oddly_encoded(content_type) or names_connector_params(body:getBytes(0, body:length()), content_type) then
    local message = "The body may name KV transfer parameters. It cannot be looked into: the gateway's service is down."
    handle:respond({[":status"] = "503", ["retry-after"] = "5"}, message)
  end
end
