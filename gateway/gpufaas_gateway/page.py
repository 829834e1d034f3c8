"""The page at ``/ui/``: it reads the functions from the API, with the browser's credentials."""

from typing import Final

PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gpufaas</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd }
  td.n { font-variant-numeric: tabular-nums }
</style>
<h1>Functions</h1>
<p><label>Namespace <select id="namespace"></select></label></p>
<table>
  <thead><tr><th>Name<th>Image<th>Calls<th>Loaded<th>Devices</thead>
  <tbody id="functions"></tbody>
</table>
<p id="said"></p>
<script>
  const at = id => document.getElementById(id)
  async function read(path) {
    const answer = await fetch(path)
    if (!answer.ok) throw new Error(await answer.text())
    return answer.json()
  }
  async function show() {
    try {
      const namespace = at("namespace").value
      const functions = await read("/system/functions?namespace=" + encodeURIComponent(namespace))
      at("functions").replaceChildren(...functions.map(each => {
        const row = document.createElement("tr")
        const loaded = each.gpufaas.ready + "/" + each.replicas
        const old = each.gpufaas.age ? ` (as of ${Math.round(each.gpufaas.age)} s ago)` : ""
        const devices = each.gpufaas.devices.join(", ") + old
        for (const text of [each.name, each.image, each.invocationCount, loaded, devices])
          row.insertCell().textContent = text
        return row
      }))
      at("said").textContent = functions.length ? "" : "None is deployed here: gpufaas up"
    } catch (error) { at("said").textContent = error.message }
  }
  async function start() {
    try {
      for (const name of await read("/system/namespaces")) at("namespace").add(new Option(name))
      at("namespace").value = "openfaas-fn"
    } catch (error) { at("said").textContent = error.message }
    at("namespace").onchange = show
    await show()
    setInterval(show, 2000)
  }
  start()
</script>
"""
