// Search in pages that were opened from the disk: browsers start no workers there, so a hidden frame runs the worker's
// script. What the script posts is answered as a worker's message; what is posted to it waits until it has been loaded.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const page = frame.contentDocument
      page.open()
      page.write("<!doctype html><body></body>")
      page.close()
      this.inside = frame.contentWindow
      this.inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      const load = path => new Promise((done, failed) => {
        const script = page.createElement("script")
        Object.assign(script, { src: path, onload: done, onerror: failed })
        page.body.appendChild(script)
      })
      this.inside.importScripts = (...paths) => paths.reduce((loaded, path) => loaded.then(() => load(path)), Promise.resolve())
      this.inside.__index = window.__index
      this.loaded = load(new URL(url, location.href).href)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }

    terminate() {}
  }
